"""The engine on a Ray cluster: `quantkit deploy` and `quantkit.deploy.app:build` (see docs/reference/deploy.md).

    client -> Ray Serve's proxy -> front (one endpoint, all models) -> replica (our server without a port) -> engine

Only app, cluster, router, ingress, replica and ranks import ray, which is an optional extra; nothing outside this
package does.
"""
