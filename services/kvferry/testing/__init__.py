"""What tests share, and what authors of connectors test theirs with. Imported by nothing that is shipped to run."""
