from nemo_rl_lite.refit.layout import ALIGNMENT, make_plan


def test_tensors_are_aligned_and_keep_their_order():
    plan = make_plan([("a", (3,), "float32"), ("b", (), "bfloat16"), ("c", (2, 100), "float32")], bucket_bytes=10_000)
    (bucket,) = plan.buckets
    assert [slot.name for slot in bucket.slots] == plan.names == ["a", "b", "c"]
    assert [slot.offset for slot in bucket.slots] == [0, ALIGNMENT, 2 * ALIGNMENT]
    assert [slot.nbytes for slot in bucket.slots] == [12, 2, 800]
    assert bucket.nbytes == plan.nbytes == 4 * ALIGNMENT


def test_a_bucket_is_never_overfilled_and_a_large_tensor_gets_its_own():
    sizes = [("a", (100,)), ("b", (100,)), ("large", (5000,)), ("c", (10,)), ("empty", (0, 7))]
    plan = make_plan([(name, shape, "float32") for name, shape in sizes], bucket_bytes=1024)
    assert [[slot.name for slot in bucket.slots] for bucket in plan.buckets] == [["a", "b"], ["large"], ["c", "empty"]]
    assert all(bucket.nbytes % ALIGNMENT == 0 for bucket in plan.buckets)


def test_the_hash_changes_with_anything_the_sides_must_agree_on():
    tensors = [("a", (4,), "float32"), ("b", (4,), "float32")]
    digest = make_plan(tensors, 4096).digest
    assert digest == make_plan(tensors, 4096).digest
    others = [
        (list(reversed(tensors)), 4096),
        ([("a", (2, 2), "float32"), tensors[1]], 4096),
        ([("a", (4,), "int32"), tensors[1]], 4096),
        (tensors, 512),
    ]
    assert all(make_plan(*other).digest != digest for other in others)
