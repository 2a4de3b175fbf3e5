"""Processes that several tests ask of how they ended."""

import functools

import pytest

from tests.parallel.processes import run_processes


@pytest.fixture(scope="module")
def run_once(tmp_path_factory):
    """`run_processes` in a folder of its own; what has run is not run again."""

    @functools.cache
    def run(module, size, *parts, **options):
        return run_processes(module, size, tmp_path_factory.mktemp("ended"), *parts, **options)

    return run
