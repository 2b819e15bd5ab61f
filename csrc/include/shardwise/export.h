#pragma once

/// Marks what the library shows to others. Everything else is hidden.
#define SHARDWISE_API __attribute__((visibility("default")))
