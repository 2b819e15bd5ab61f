#define CATCH_CONFIG_MAIN
#include "support/catch_seconds.h"
