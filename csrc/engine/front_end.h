// What a front end uses of the engine: it makes units, reports what happens to their modules and tensors, and asks
// where things are kept. engine/order.h decides when units are gathered, freed and summed.
#pragma once

#include "engine/backward_watch.h"
#include "engine/estimate.h"
#include "engine/unit.h"
