#pragma once

// Everything that shardwise offers to a C++ program.

// These five are enough for most programs.
#include <shardwise/fully_shard.h>
#include <shardwise/mesh.h>
#include <shardwise/options.h>
#include <shardwise/replicate.h>
#include <shardwise/save.h>

// For parts of a training loop.
#include <shardwise/activation_checkpoint.h>
#include <shardwise/clip_grad_norm.h>
#include <shardwise/for_each_batch.h>
#include <shardwise/grad_scaler.h>
#include <shardwise/meta.h>
#include <shardwise/optimizers.h>
#include <shardwise/state_dict.h>
#include <shardwise/unit.h>

// For tensor and pipeline parallelism.
#include <shardwise/parallelize.h>
#include <shardwise/pipeline.h>

// For calls that fire hooks.
#include <shardwise/call.h>
#include <shardwise/hooks.h>

// What happened, and what will happen.
#include <shardwise/counters.h>
#include <shardwise/error.h>
#include <shardwise/estimate.h>
#include <shardwise/plan.h>
#include <shardwise/record.h>
#include <shardwise/shared_memory.h>
#include <shardwise/version.h>

/// Data parallelism for LibTorch programs. Begin with Mesh::from_env(), then fully_shard() or replicate(); their
/// options are FullyShardOptions and ReplicateOptions, and unit() gives the handle of a wrapped module.
namespace shardwise {}
