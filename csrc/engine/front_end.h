// What a front end uses of the engine: it makes units, reports what happens to their modules and tensors, and asks
// where things are kept. When units are gathered, freed and summed is decided elsewhere (engine/schedule.h).
#pragma once

#include "engine/backward_watch.h"
#include "engine/estimate.h"
#include "engine/unit.h"
