"""Limits of messages between processes. Text serving applies them before a message is built."""

MAX_MESSAGE_BYTES = 16 << 20
"""Largest size of a message; a million token ids take at most 5 MiB, and KV pages are not sent over gRPC."""

MAX_TOKEN_IDS = 1 << 20
"""Largest number of token ids in a message; far above any served context length."""

MAX_CACHE_SALT_CHARS = 1024
"""Largest number of characters of a cache salt."""

MAX_AFFINITY_KEY_CHARS = 1024
"""Largest number of characters of a key that keeps the requests of a conversation on one worker."""
