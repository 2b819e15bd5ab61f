#pragma once

// Everything that shardwise offers to a C++ program.
#include <shardwise/activation_checkpoint.h>
#include <shardwise/call.h>
#include <shardwise/clip_grad_norm.h>
#include <shardwise/counters.h>
#include <shardwise/error.h>
#include <shardwise/estimate.h>
#include <shardwise/for_each_batch.h>
#include <shardwise/fully_shard.h>
#include <shardwise/grad_scaler.h>
#include <shardwise/detail/holder.h>
#include <shardwise/hooks.h>
#include <shardwise/mesh.h>
#include <shardwise/meta.h>
#include <shardwise/optimizer_state_dict.h>
#include <shardwise/optimizers.h>
#include <shardwise/options.h>
#include <shardwise/parallelize.h>
#include <shardwise/pipeline.h>
#include <shardwise/plan.h>
#include <shardwise/record.h>
#include <shardwise/replicate.h>
#include <shardwise/save.h>
#include <shardwise/saver.h>
#include <shardwise/shared_memory.h>
#include <shardwise/state_dict.h>
#include <shardwise/unit.h>
#include <shardwise/version.h>

/// Data parallelism for LibTorch programs. Begin with Mesh::from_env(), then fully_shard() or replicate(); the options
/// of each are in the struct of its name, and unit() gives the handle of a module that was wrapped.
namespace shardwise {}
