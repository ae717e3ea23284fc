from tests.redis_fixtures import redis_server, shared_redis

__all__ = ["redis_server", "shared_redis"]
