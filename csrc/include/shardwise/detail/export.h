#pragma once

/// Marks what the library exports. Everything else is hidden.
#define SHARDWISE_API __attribute__((visibility("default")))
