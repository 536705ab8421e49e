#include "ballast/tests/test_headers.h"
