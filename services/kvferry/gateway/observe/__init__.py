"""Views of the gateway for administrators: metrics, dashboard, and the trace of requests.

Knows the decisions whose outcomes it counts; nothing here changes a request.
"""
