"""Client programs in other languages, which use OpenAI's own packages: Go in `go`, Node in `node`.

Both make the same calls and print one JSON object with the same members.
"""
