# SPDX-License-Identifier: Apache-2.0
"""From packages to a running application of Ray Serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from ikbo._load import ops_library_path
from ikbo.ray.replica import ServerReplica

# Ray's own router by consistent hashing reads it (RAY_SERVE_SESSION_ID_HEADER_KEY renames it).
USER_HEADER = "x-session-id"
_USER_AFFINITY = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"


def application(
    packages: Sequence[str],
    *,
    server: str,
    num_replicas: int = 1,
    cpus_per_replica: float = 1,
    max_ongoing_requests: int = 256,
    ops_library: str | None = None,
    flags: Sequence[str] = (),
    deployment_options: Mapping[str, Any] | None = None,
) -> serve.Application:
    """An application that answers what ikbo-server answers over HTTP, on ``num_replicas`` servers.

    Requests of one user, as the header ``USER_HEADER`` names it, go to one replica as long as it
    lives and has room; when it dies, its users alone move, and a replica that is added, in its
    place or beside it, takes a share of all. Requests without the header go to any.

    Args:
        packages: paths that exist on every node.
        server: path of ikbo-server, likewise.
        num_replicas: server processes.
        cpus_per_replica: what Ray reserves for each; at least the threads that it uses.
        max_ongoing_requests: requests that Ray sends to one replica at once. Below the server's
            ``--max-queue``, Ray holds the rest back instead of having it refused.
        ops_library: None: the one of this installation.
        flags: more of ikbo-server's.
        deployment_options: more of ``ray.serve.deployment``'s, ``max_replicas_per_node`` say.

    Errors:
        ValueError: no package.
    """
    if not packages:
        raise ValueError("ikbo.ray: packages must name at least one package; got none")
    command = [server, "--ops-library", ops_library or str(ops_library_path())]
    for package in packages:
        command += ["--model", package]
    deployment = serve.deployment(ServerReplica).options(
        name="ikbo-server",
        num_replicas=num_replicas,
        max_ongoing_requests=max_ongoing_requests,
        ray_actor_options={"num_cpus": cpus_per_replica},
        health_check_period_s=2,
        health_check_timeout_s=10,
        request_router_config=RequestRouterConfig(request_router_class=_USER_AFFINITY),
        **(deployment_options or {}),
    )
    return deployment.bind([*command, *flags])


def deploy(packages: Sequence[str], *, name: str, route_prefix: str = "/", **options: Any) -> None:
    """Runs ``application(packages, **options)`` in the cluster that this process is connected to,
    and returns once all replicas are ready.

    Args:
        packages: see ``application``.
        name: of the application.
        route_prefix: of its URLs: ``<prefix>/v2/models/M/infer``.
        options: of ``application``.
    """
    serve.run(application(packages, **options), name=name, route_prefix=route_prefix)
