"""``frameshard models``: lists models and fetches them by name."""

from __future__ import annotations

import argparse

from . import common


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "models",
        help="fetch models, and list those at hand",
        description="Models are named by a short name (see `models list`), by hf:OWNER/REPO/FILE.gguf on Hugging Face "
        "(hf:OWNER/REPO@REVISION/FILE.gguf for a tag or commit), or by a path. A fetch that was interrupted goes on "
        "where it stopped.",
    )
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="known names and what is fetched")
    fetch = actions.add_parser("fetch", help="fetch a model now; does nothing if it is there")
    path = actions.add_parser("path", help="print where a model's file is, fetching it if need be")
    fetch.add_argument("--sha256", metavar="HASH", help="refuse another file than this one")
    for action in (fetch, path):
        action.add_argument("name", metavar="NAME", help="a known name or hf:OWNER/REPO[@REVISION]/FILE.gguf")
    for action in (listing, fetch, path):
        common.add_json_arg(action)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from frameshard import models

    if args.action == "list":
        return _list(args)
    if args.action == "fetch" and args.sha256 is not None:
        path = models.fetch(args.name, sha256=args.sha256)
    else:
        mmproj = models.mmproj_of(args.name)
        if args.action == "fetch" and mmproj is not None:
            models.resolve(mmproj)
        path = models.resolve(args.name)
    if args.json:
        found = models.locate(path)
        n_bytes = found.path.stat().st_size if found.n_bytes is None else found.n_bytes
        common.emit_json({"name": args.name, "path": str(path), "bytes": n_bytes})
    else:
        print(path)
    return 0


def _list(args: argparse.Namespace) -> int:
    from frameshard import models

    known = [
        {"name": name, "about": about, "bytes": n_bytes, "path": str(path) if models.is_file(path) else None}
        for name, about, n_bytes, path in models.known()
    ]
    paths = {model["path"] for model in known}
    others = [{"path": str(p), "bytes": p.stat().st_size} for p in models.fetched() if str(p) not in paths]
    if args.json:
        common.emit_json({"known": known, "others": others})
        return 0
    for model in known:
        print(model["name"])
        print(common.wrapped(str(model["about"]), indent=4))
        print(f"    {model['path'] or 'not fetched yet'}")
    for other in others:
        print(f"{other['path']}\n    {common.format_size(int(str(other['bytes'])))}")
    return 0
