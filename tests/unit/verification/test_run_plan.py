from verification.plan import VALUES, RunSpec, covering_set, in_order, pairs, product, references, short_set


def test_every_pair_of_values_occurs_in_a_run_that_is_compared_with_another():
    chosen = covering_set()
    compared = [spec for spec in chosen if spec not in references()]
    every = set().union(*(pairs(spec) for spec in product()))
    assert set().union(*(pairs(spec) for spec in compared)) == every
    assert {spec.data_setting for spec in compared} == {spec.data_setting for spec in references()}
    assert len(chosen) < 20
    assert len({spec.name for spec in chosen}) == len(chosen)


def test_each_data_setting_has_an_undisturbed_reference_that_runs_first():
    first = in_order(covering_set())[:4]
    assert {spec.data_setting for spec in first} == {
        ("latents", "one"),
        ("latents", "several"),
        ("images", "one"),
        ("images", "several"),
    }
    assert all(spec.interruption == "none" and spec.world_size == 1 for spec in first)
    assert set(in_order(product())[:4]) == set(references())


def test_the_short_set_varies_what_belongs_to_the_machine():
    chosen = short_set()
    assert chosen[0] == RunSpec()
    for name in ("world_size", "microbatch", "workers", "parallelism"):
        assert len({getattr(spec, name) for spec in chosen}) == 2, name
    assert {spec.interruption for spec in chosen} == set(VALUES["interruption"])
