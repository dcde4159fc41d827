# SPDX-License-Identifier: Apache-2.0
"""Asks a server of the model `plain` by KServe's clients and prints their answers as JSON.

Runs in the environment of requirements/kserve.txt. usage: kserve_client.py HTTP GRPC (addresses)
"""

from __future__ import annotations

import asyncio
import json
import sys

import numpy as np
from kserve import (
    InferenceGRPCClient,
    InferenceRESTClient,
    InferInput,
    InferOutput,
    InferRequest,
    RESTConfig,
)
from kserve.protocol.infer_type import RequestedOutput

X = np.arange(2000, dtype=np.float32).reshape(500, 4) / 1000


def request(binary: bool) -> InferRequest:
    tensor = InferInput("x", [500, 4], "FP32")
    tensor.set_data_from_numpy(X, binary_data=binary)
    wanted = RequestedOutput("score", parameters={"binary_data": binary})
    return InferRequest("plain", [tensor], request_id="7", request_outputs=[wanted])


def described(output: InferOutput) -> list[float]:
    return output.as_numpy().flatten().tolist()


async def ask(http_address: str, grpc_address: str) -> dict[str, object]:
    url = f"http://{http_address}"
    answers: dict[str, object] = {}
    async with InferenceRESTClient(RESTConfig(protocol="v2")) as rest:
        answers["rest_ready"] = [
            await rest.is_server_live(url),
            await rest.is_server_ready(url),
            await rest.is_model_ready(url, "plain"),
        ]
        for kind, binary in (("rest_binary", True), ("rest_json", False)):
            answer = await rest.infer(url, request(binary), model_name="plain")
            answers[kind] = described(answer.outputs[0])
    async with InferenceGRPCClient(grpc_address) as client:
        answers["grpc_ready"] = [
            await client.is_server_live(),
            await client.is_server_ready(),
            await client.is_model_ready("plain"),
        ]
        for kind, binary in (("grpc_raw", True), ("grpc_typed", False)):
            answers[kind] = described((await client.infer(request(binary))).outputs[0])
    return answers


if __name__ == "__main__":
    print(json.dumps(asyncio.run(ask(*sys.argv[1:]))))
