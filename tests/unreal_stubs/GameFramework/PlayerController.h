#pragma once

#include "GameFramework/Actor.h"

struct FInputModeUIOnly {};

class APlayerController : public AActor {
  public:
    void SetShowMouseCursor(bool) {}
    void SetInputMode(const FInputModeUIOnly &) {}
};
