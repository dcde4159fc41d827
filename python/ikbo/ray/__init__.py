# SPDX-License-Identifier: Apache-2.0
"""ikbo-server behind Ray Serve: Ray places, routes, watches and replaces; each replica is one
server process. `pip install "ray[serve]"` beside ikbo; ``docs/scale-out.md`` has the whole."""

from ikbo.ray.client import RetryPolicy, infer
from ikbo.ray.deploy import USER_HEADER, application, deploy

__all__ = ["USER_HEADER", "RetryPolicy", "application", "deploy", "infer"]
