"""Routes that generate no tokens: token ids of texts, embeddings, scores, and the bodies of pinned prefixes."""
