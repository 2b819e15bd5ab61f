// What a front end knows of the engine: it makes units, tells them what happens to their modules and tensors, and asks
// where they keep what. When a unit is gathered, freed and summed is not its affair (engine/schedule.h).
#pragma once

#include "engine/backward_watch.h"
#include "engine/memory_outline.h"
#include "engine/shards.h"
#include "engine/still_on_meta.h"
#include "engine/unit.h"
