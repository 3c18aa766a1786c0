"""Shared test code: fakes, real servers and clusters, the explorer, generated documents. Not part of releases.

`make setup` adds this folder's parent to the environment's import path, so that `python -m harness.kube` works.
It may import any module of `kvferry`; `kvferry` must not import it.
"""
