"""Input and output formats: fleet files in TOML, results as JSON, text and charts.

Pure: the caller reads and writes the files. A new field of a fleet file belongs here, with its bounds.
"""
