#pragma once

#include "blocks.h"

/// Measures what tensor and pipeline parallelism cost the host: two layers in each block, and as many microbatches of
/// two stages. Each beside the same work without (`_none`).
void measure_parallelism(const Size& size);
