#pragma once

#include "CoreMinimal.h"

class IModuleInterface {
  public:
    virtual ~IModuleInterface() = default;
};
class FDefaultModuleImpl : public IModuleInterface {};
#define IMPLEMENT_MODULE(Class, Name)                                                                                  \
    IModuleInterface *MakeModule##Name() { return new Class; }
