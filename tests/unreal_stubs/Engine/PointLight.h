#pragma once

#include "GameFramework/Actor.h"

class APointLight : public AActor {};
