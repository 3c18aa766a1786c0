"""Chat templates: a sandbox with budgets, since a template comes with the model's files."""
