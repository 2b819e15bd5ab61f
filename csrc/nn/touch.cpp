#include "nn/touch.h"
