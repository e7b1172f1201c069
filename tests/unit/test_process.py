import gc

from shared.runtime.process import settle


def test_the_collector_does_not_look_again_at_what_there_was_when_a_service_had_settled() -> None:
    before = gc.get_freeze_count()
    kept: list[dict[str, list[object]]] = [{"a cycle": []} for _ in range(1000)]
    for one in kept:
        one["a cycle"].append(one)
    try:
        settle()
        assert gc.get_freeze_count() - before >= len(kept)
        assert not any(one is kept[0] for one in gc.get_objects())
    finally:
        gc.unfreeze()
