"""The dashboard of the admin port: percentiles over time, phases of a request (pure), and the page's files in `page`.

The page is plain HTML, CSS and ES modules; it reads only the JSON that the admin API serves.
"""
