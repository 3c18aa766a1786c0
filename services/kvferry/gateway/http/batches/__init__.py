"""The routes of files and batches in OpenAI's form.

Files and batches themselves are in `gateway/batches`; a line is a request to the client API of this process.
"""
