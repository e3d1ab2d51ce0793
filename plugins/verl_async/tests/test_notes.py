from __future__ import annotations

import logging

from verl_async.ray.notes import notes_of_packages


def test_what_packages_log_is_collected_in_order_and_their_levels_come_back() -> None:
    chosen, other = logging.getLogger("notes_chosen"), logging.getLogger("notes_other")
    with notes_of_packages("notes_chosen") as notes:
        logging.getLogger("notes_chosen.below").info("first, of %d", 2)
        chosen.debug("too fine")
        other.warning("of another")
        chosen.warning("second")
    chosen.warning("too late")
    assert notes == ["first, of 2", "second"]
    assert (chosen.level, chosen.handlers) == (logging.NOTSET, [])
