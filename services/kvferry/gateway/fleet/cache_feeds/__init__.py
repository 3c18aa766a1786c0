"""Subscribes to the cache feeds of the fleet's workers and applies them to the gateway's cache map."""
