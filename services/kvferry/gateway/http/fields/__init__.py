"""Fields of OpenAI's requests that are objects, by subject."""
