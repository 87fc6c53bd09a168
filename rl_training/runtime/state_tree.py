"""Splits a tree of state into JSON, tensors and arrays, and joins it again: how state is stored without pickle."""

from typing import Any

import numpy as np
import torch


def split(tree: Any) -> tuple[Any, dict[str, torch.Tensor], dict[str, np.ndarray[Any, Any]]]:
    """Return the tree as JSON data with its tensors and arrays taken out, each under the name of its path."""
    tensors: dict[str, torch.Tensor] = {}
    arrays: dict[str, np.ndarray[Any, Any]] = {}

    def encode(node: Any, path: str) -> Any:
        if isinstance(node, torch.Tensor):
            tensors[path] = node.detach().cpu()
            return {"$tensor": path}
        if isinstance(node, np.ndarray):
            arrays[path] = node
            return {"$array": path}
        if isinstance(node, dict):
            if all(isinstance(key, str) and not key.startswith("$") for key in node):
                return {key: encode(value, f"{path}/{key}") for key, value in node.items()}
            return {"$items": [[encode(key, path), encode(value, f"{path}/{key}")] for key, value in node.items()]}
        if isinstance(node, tuple):
            return {"$tuple": [encode(value, f"{path}/{index}") for index, value in enumerate(node)]}
        if isinstance(node, list):
            return [encode(value, f"{path}/{index}") for index, value in enumerate(node)]
        if isinstance(node, np.generic):
            return node.item()
        if node is None or isinstance(node, (bool, int, float, str)):
            return node
        raise TypeError(f"state at {path} has type {type(node).__name__}, which a checkpoint cannot hold")

    return encode(tree, ""), tensors, arrays


def join(tree: Any, tensors: dict[str, torch.Tensor], arrays: dict[str, np.ndarray[Any, Any]]) -> Any:
    """Undo `split`."""

    def decode(node: Any) -> Any:
        if isinstance(node, list):
            return [decode(value) for value in node]
        if not isinstance(node, dict):
            return node
        match node:
            case {"$tensor": path}:
                return tensors[path]
            case {"$array": path}:
                return arrays[path]
            case {"$items": items}:
                return {decode(key): decode(value) for key, value in items}
            case {"$tuple": values}:
                return tuple(decode(value) for value in values)
        return {key: decode(value) for key, value in node.items()}

    return decode(tree)
