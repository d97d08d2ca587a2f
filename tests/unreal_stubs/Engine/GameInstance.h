#pragma once

#include "CoreMinimal.h"

#include "Subsystems/GameInstanceSubsystem.h"

class UGameInstance : public UObject {
  public:
    template <class T> T *GetSubsystem() const { return static_cast<T *>(Subsystem); }

    bool IsDedicatedServerInstance() const { return Dedicated; }

    bool Dedicated = false;                      // not in Unreal
    UGameInstanceSubsystem *Subsystem = nullptr; // not in Unreal; there is only one subsystem
};
