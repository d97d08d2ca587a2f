#pragma once

#include "CoreMinimal.h"

#include "Engine/World.h"

enum class EGetWorldErrorMode { ReturnNull, LogAndReturnNull, Assert };

class UEngine : public UObject {
  public:
    UWorld *GetWorldFromContextObject(const UObject *Object, EGetWorldErrorMode) const { return Object->GetWorld(); }
};
inline UEngine *GEngine = NewObject<UEngine>();
