"""What tests share, and what authors of connectors test theirs with.

May import anything; nothing that ships imports it, and it imports no pytest.
"""
