"""Text of a model: tokens to text and back, chat templates, tools, answers and constraints.

Uses no torch: the gateway uses this package. From the top: `requests` has the rules of requests and answers, `tools`
puts tools into prompts, `grammar` compiles constraints, `answers` splits output, and `templates` and `tokenizing` read
the model's files.
"""
