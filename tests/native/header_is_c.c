#include "frameshard_device.h"
typedef fsd_status (*header_is_c)(const fsd_config *);
