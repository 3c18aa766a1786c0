"""What a request offers a model to call: functions, the choice among them, and how both reach the model.

A template with tools of its own gets them as they are; for other templates they are written into the system message.
"""
