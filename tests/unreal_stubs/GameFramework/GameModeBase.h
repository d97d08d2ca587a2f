#pragma once

#include "GameFramework/Actor.h"

class AGameModeBase : public AActor {
  public:
    using Super = AGameModeBase; // for derived classes
};
