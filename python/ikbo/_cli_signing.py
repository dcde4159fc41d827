# SPDX-License-Identifier: Apache-2.0
"""The command line's `ikbo sign` and `ikbo verify`."""

from __future__ import annotations

import argparse
from typing import Any


def add_signing(commands: Any) -> None:
    sign = _add(commands, "sign", _sign, "sign a package with an Ed25519 key")
    sign.add_argument(
        "--key", metavar="KEY.pem", required=True, help="the private key, as openssl writes it"
    )
    verify = _add(commands, "verify", _verify, "check the digests and the signature of a package")
    verify.add_argument(
        "--trusted-key",
        metavar="KEY.pem",
        action="append",
        default=[],
        help="a public key; one of those given must have signed the package (default: the digests "
        "alone are checked)",
    )


def _add(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    command.set_defaults(run=run)
    command.add_argument("package", metavar="PACKAGE", help="a .pt2 file of `ikbo package`")
    command.add_argument(
        "--traceback", action="store_true", help="print the Python traceback of an error"
    )
    return command


def _sign(options: argparse.Namespace) -> None:
    from ikbo.signing import sign

    sign(options.package, options.key)
    print(f"signed {options.package}")


def _verify(options: argparse.Namespace) -> None:
    from ikbo.signing import verify

    files = verify(options.package, options.trusted_key).files
    signed = ", signed by a trusted key" if options.trusted_key else ""
    print(f"{options.package}: {len(files)} files as the manifest lists them{signed}")
