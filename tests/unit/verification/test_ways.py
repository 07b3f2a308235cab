from verification.ways import VALUES, RunSpec, covering_set, pairs, product, references, short_set


def test_every_pair_of_values_occurs_in_a_run_that_is_compared_with_another():
    chosen = covering_set()
    assert chosen[:4] == references()
    assert set().union(*(pairs(spec) for spec in chosen[4:])) == set().union(*(pairs(spec) for spec in product()))
    assert {spec.data_setting for spec in chosen[4:]} == {spec.data_setting for spec in references()}
    assert len(chosen) < 20
    assert len({spec.name for spec in chosen}) == len(chosen)


def test_the_references_are_undisturbed_runs_on_one_rank_and_run_first():
    assert {spec.data_setting for spec in references()} == {
        (representation, buckets) for representation in VALUES["representation"] for buckets in VALUES["buckets"]
    }
    assert all(spec.interruption == "none" and spec.world_size == 1 for spec in references())
    assert product()[:4] == references()


def test_the_short_set_varies_what_belongs_to_the_machine():
    chosen = short_set()
    assert chosen[0] == RunSpec()
    for name in ("world_size", "microbatch", "workers", "parallelism"):
        assert len({getattr(spec, name) for spec in chosen}) > 1, name
    assert {spec.interruption for spec in chosen} == set(VALUES["interruption"])
