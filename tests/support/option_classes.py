"""Every class of options, wherever it stands."""

import dataclasses
import importlib.util
import pkgutil

import mlaforge


def option_classes() -> list[type]:
    """The dataclasses that the packages' config.py define."""
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
