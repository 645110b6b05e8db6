"""All option dataclasses."""

import dataclasses
import importlib.util
import pkgutil

import mlaforge


def option_classes() -> list[type]:
    """Return the dataclasses defined in the packages' config.py."""
    modules = [
        importlib.import_module(f"mlaforge.{package.name}.config")
        for package in pkgutil.iter_modules(mlaforge.__path__)
        if package.ispkg and importlib.util.find_spec(f"mlaforge.{package.name}.config")
    ]
    return [
        value
        for module in modules
        for value in vars(module).values()
        if dataclasses.is_dataclass(value) and value.__module__ == module.__name__
    ]
