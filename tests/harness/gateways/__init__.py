"""Parts of scripted workers behind a gateway under test."""
