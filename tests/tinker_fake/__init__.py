"""A stand-in for Tinker's HTTP service on loopback, with a real (tiny) model behind it."""

from tests.tinker_fake.service import FakeTinker

__all__ = ["FakeTinker"]
