"""Routes that answer a request with one JSON object: embeddings, scores, rerankings, token ids."""
