#pragma once

#include "CoreMinimal.h"

class UBlueprintAsyncActionBase : public UObject {
  public:
    virtual void Activate() {}
    void RegisterWithGameInstance(const UObject *) {}
    virtual void SetReadyToDestroy() { Ready = true; }

    bool Ready = false; // not in Unreal
};
