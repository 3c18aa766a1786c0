"""Fields of OpenAI's requests that are objects of their own, by subject."""
