"""Models of the Hugging Face Hub: their names, which of their files are needed, and the download into the shared
cache."""
