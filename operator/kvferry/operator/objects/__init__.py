"""Kubernetes objects of a pool as plain dictionaries: worker and gateway Deployments, Services, policies, budgets. Pure
functions from a spec to manifests. Fields are owned through server-side apply.
"""
