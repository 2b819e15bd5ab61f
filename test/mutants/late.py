"""Mistakes that only a device makes visible, which is late: what a stream has to wait for, and which memory when."""

from __future__ import annotations

from mutant import Mutant

_CORE = "FullyShard1DTrainingCore.*"


def _late(name: str, file: str, old: str, new: str, suites: str = _CORE) -> Mutant:
    return Mutant(name, f"csrc/{file}", old, new, suites=suites, device="late")


LATE = [
    _late(
        "let no stream wait for a collective",
        "comm/collectives/collectives.cpp",
        "  if (!work_) return;\n  waited_ = true;",
        "  if (!work_ || in_stream_) return;\n  waited_ = true;",
    ),
    _late(
        "give a cast shard back to the pool before the gather that reads it",
        "group/full_copies.cpp",
        "  places_directly_ = !may_hold &&",
        "  buffers.give(std::exchange(sent_, at::Tensor()));\n  places_directly_ = !may_hold &&",
        "FullyShardMixedPrecision*",
    ),
    _late(
        "copy shards from the host on the stream that computes",
        "group/full_copies.cpp",
        "    scope.emplace(from_host_, place.device());\n",
        "",
        "LateOverlap*",
    ),
    _late(
        "compute with full parameters before they came from the host",
        "group/full_copies.cpp",
        "    await_gather();\n    copy_out();",
        "    copy_out();",
        "LateOffload*",
    ),
    _late(
        "give a bucket back to the pool before its sum",
        "group/gradients.cpp",
        "  wait_in_stream();\n  if (scattered()) bucket_use_ = buffers.note(bucket_);\n",
        "  if (scattered()) bucket_use_ = buffers.note(bucket_);\n  wait_in_stream();\n",
    ),
    _late(
        "publish gradients before their sum",
        "group/gradients_publish.cpp",
        "  await_result();\n  if (hook) {",
        "  if (hook) {",
    ),
    _late(
        "sum a bucket before it is filled",
        "group/gradients.cpp",
        "    streams->shards.follow_current(device());\n",
        "",
    ),
    _late(
        "let each sum wait for the one before, as on a CPU",
        "engine/unit_making.cpp",
        "      .sums_in_stream = unit->ranks_.wait_in_stream(),\n",
        "",
        "LateOverlap.*",
    ),
    Mutant(
        "start sums of a stream as soon as this rank has its gradients",
        "csrc/engine/order_backward.cpp",
        "sums_in_stream_ || is_seen_in_backward(node.head);",
        "sums_in_stream_ && is_seen_in_backward(node.head);",
    ),
    _late(
        "gather without a wait for the optimizer's stream",
        "engine/schedule.cpp",
        "  if (const auto wait = std::exchange(await_event, {})) wait();",
        "  await_event = {};",
        "LateEngine.AnOptimizerOnAStreamOfItsOwn",
    ),
    _late(
        "load values into a shard that a gather still reads",
        "group/full_copies_values.cpp",
        "  if (pending_) pending_->settle();\n",
        "",
        "FullyShardStateDictLoad.LoadMakesKeptCopiesStale",
    ),
    _late(
        "take memory from the pool without a wait for its last use on another stream",
        "comm/collectives/buffers.cpp",
        "      idle.last_use.await(idle.memory);\n",
        "",
        "LateEngine.MemoryThatGoesFromStreamToStreamIsWaitedFor",
    ),
    _late(
        "free memory of the pool while another stream still uses it",
        "comm/collectives/buffers.cpp",
        "  idle.last_use.tell_allocator(idle.memory);\n",
        "",
        "LateEngine.MemoryGoesBackToItsAllocatorAfterItsLastUse",
    ),
    _late(
        "read gradients on the host before their copy is over",
        "comm/streams/host_copies.cpp",
        "  stream_.make_host_wait();\n",
        "",
        "LateOffload.GradientsThatAreKept",
    ),
    _late(
        "let the host write to a shard that the device still reads",
        "group/full_copies.h",
        "    host_read_.make_host_wait();\n",
        "",
        "LateOffload.AShardMayBeWrittenRightAfterAForward",
    ),
    _late(
        "gather by hand without a wait for the optimizer's stream",
        "engine/schedule.cpp",
        "  follow_optimizer();\n  if (unit.begin_unshard())",
        "  if (unit.begin_unshard())",
        "LateEngine.UnshardByHandWaitsForTheOptimizersEvent",
    ),
    _late(
        "read and load state dicts without a wait for the optimizer's stream",
        "nn/state/module_state.cpp",
        "      unit->schedule()->follow_optimizer();\n",
        "",
        "LateEngine.StateDictsWaitForTheOptimizersEvent:LateEngine.LoadedValuesWaitForTheOptimizersEvent",
    ),
    _late(
        "send a device's tensors before they were copied to the host",
        "transport/staging.cpp",
        "    copied->synchronize();\n",
        "",
        "LateStaged.*",
    ),
    _late(
        "let no stream wait for what comes back from the host",
        "transport/staging.cpp",
        "    landed_.block(guard_of(in_.device()).getStream(in_.device()));\n",
        "",
        "LateStaged.*",
    ),
    _late(
        "let a tensor of a device go while it comes back from the host",
        "transport/staging.cpp",
        "      guard_of(in_.device()).recordDataPtrOnStream(writes_[i].storage().data_ptr(), in_);\n",
        "",
        "LateStaged.*",
    ),
    _late(
        "give steps without a graph the memory that one uses",
        "comm/collectives/buffers.cpp",
        "(capturing || !idle_[i].captured)",
        "true",
        "LatePool.*",
    ),
    _late(
        "connect the ranks of a group at its first collective",
        "comm/mesh/process_group.cpp",
        "    if (spec.size > 1) made->eagerConnectSingleDevice(spec.device);\n",
        "",
        "LateEngine.GroupsAreConnected*",
    ),
]
